"""The samples of training and validation: which corpus comes when, and the documents packed into each."""

"""The samples of training and validation: which corpus comes when, and how documents are packed."""

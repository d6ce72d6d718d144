"""What runs showed, as one page that a person wants to look at, and its figures as pictures."""

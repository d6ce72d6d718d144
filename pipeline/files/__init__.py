"""Reading and writing files: one typed line for each fault, and no file that is half written."""

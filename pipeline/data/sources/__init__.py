"""Where documents come from: names and patterns of files, streams of text, and the records in each
format."""

"""What the folder of a run, or of a study, says: who works in it, how far it is, what was measured. Loads no torch."""

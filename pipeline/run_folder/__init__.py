"""What a run folder says of its run: who works in it, which attempts were made, how far it is. Loads no torch."""

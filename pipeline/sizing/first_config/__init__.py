"""What `scale-cpt config init` proposes: `propose.py` puts the sections together."""

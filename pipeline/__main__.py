"""`python -m pipeline` is `scale-cpt`."""

from pipeline.cli import main

if __name__ == "__main__":
    main()

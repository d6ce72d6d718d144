"""`scale-cpt combinations` as a file. Its options: python tools/combinations.py --help"""

if __name__ == "__main__":
    import sys

    if not getattr(sys.flags, "safe_path", False):
        # Python puts this folder first, where tokenize.py and inspect.py would hide Python's own.
        del sys.path[0]
    from pipeline.cli import main

    sys.argv.insert(1, "combinations")
    main()

"""`scale-cpt try` as a file. Its options: python tools/try_run.py --help"""

if __name__ == "__main__":
    import sys

    if not getattr(sys.flags, "safe_path", False):
        # Python puts this folder first, where tokenize.py and inspect.py would hide Python's own.
        del sys.path[0]
    from pipeline.cli import main

    sys.argv.insert(1, "try")
    main()

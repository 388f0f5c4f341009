"""`python -m pipeline ENTRY --setting value ...`."""

from pipeline.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m cuvee`."""

from cuvee.cli import main

if __name__ == "__main__":
    main()

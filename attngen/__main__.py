"""``python -m attngen``."""

from attngen.cli import main

if __name__ == "__main__":
    main()

"""`python -m streamtrain` is `streamtrain`."""

from streamtrain.cli import main

if __name__ == "__main__":
    main()

"""`python -m litft`: the same as `litft`."""

from litft.cli import main

if __name__ == "__main__":
    main()

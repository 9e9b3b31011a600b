"""For `accelerate launch --module offramp.cli train …`."""

from offramp.cli import main

if __name__ == "__main__":
    main()

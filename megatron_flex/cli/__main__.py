"""`python -m megatron_flex.cli`."""

from megatron_flex.cli import main

if __name__ == "__main__":
    main()

"""Statistics at work: what is measured on the way of a tensor, and put together at the end of a step."""

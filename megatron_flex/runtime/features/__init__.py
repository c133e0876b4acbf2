"""Features: hidden states of chosen layers on the ranks of other pipeline stages, within the step."""

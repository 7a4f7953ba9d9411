"""Which method and which settings pay, measured on the user's own model and prompts."""

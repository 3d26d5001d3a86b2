"""Names of arguments: what a misspelt one meant, and calls with wrong ones."""

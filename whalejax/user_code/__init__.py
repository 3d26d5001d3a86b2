"""Features for users' own code: marks, losses, attention, and the ambient mesh."""

"""Parts of users' own code: marks, losses, attention, and the mesh around it."""

"""What a peer holds and adds up."""

"""What processes of a launch share: their environment, rendezvous, ports and output."""

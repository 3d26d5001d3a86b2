"""Environment, rendezvous, ports and output of the processes of a launch."""

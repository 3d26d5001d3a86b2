"""How the gradients of an elastic run's processes are added up, chosen by price."""

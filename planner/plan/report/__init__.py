"""What a plan says of itself: pages, reasons, differences and exports."""

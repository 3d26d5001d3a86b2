"""Reports of a plan: pages, reasons, differences and exports."""

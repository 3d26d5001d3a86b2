"""Reports on a plan: pages, reasons, differences and exports."""

"""Reports: pages of one HTML file each, readable without network, and the figures in them. Knows no flow."""

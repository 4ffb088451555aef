"""Layers that store codes look and act as float layers."""

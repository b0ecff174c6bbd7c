"""What needs mmseg itself."""

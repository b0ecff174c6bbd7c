"""What needs mmpretrain itself."""

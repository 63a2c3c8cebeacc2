"""The name that extension packages give their binary; importing the package has loaded it."""

"""The only code that writes the rows of images and of their builds. Everything else about images knows no Django."""

"""Read queries for the API and the pages. Nothing here writes."""

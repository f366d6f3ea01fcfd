"""Tasks made for trials and measurements, with vocabularies of their own."""

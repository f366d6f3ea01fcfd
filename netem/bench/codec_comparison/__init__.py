"""The codec beside other systems' formats."""

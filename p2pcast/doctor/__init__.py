"""Which roles a machine is fit for, and the command line that corrects each fault (``p2pcast doctor``)."""

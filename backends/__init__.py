"""kernelreg's own backends, one folder each. Found through the entry-point group, as anyone's are."""

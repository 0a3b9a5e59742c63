"""ssvit compared with other libraries, measured in turn in the same process."""

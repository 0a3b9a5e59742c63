"""ssvit beside what else there is, measured in the same process in the same minutes."""

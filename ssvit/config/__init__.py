"""Options and commands: declaration, composition, validation and help. No module here names a part."""

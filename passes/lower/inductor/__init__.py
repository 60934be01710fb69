"""What backends share whose programs Inductor compiles."""

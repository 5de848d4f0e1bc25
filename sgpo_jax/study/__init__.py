"""Methods x seeds x tasks side by side: `launch study`."""

"""Files of data that users bring: images and arrays, looked at before they are unfolded."""

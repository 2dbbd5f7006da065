"""Small tools that any part of the codec may use: files, forks, JSON, lazy attributes, suggestions."""

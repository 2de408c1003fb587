package main

import "example.com/ssmscan"

// everyImage is all images of the package; invoke package writes this file with all of them.
var everyImage []ssmscan.Images

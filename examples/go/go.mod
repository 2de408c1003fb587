module example.com/ssmscan-example

go 1.24

require example.com/ssmscan v0.0.0

replace example.com/ssmscan => ../..

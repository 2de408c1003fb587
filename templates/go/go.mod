module example.com/ssmscan

go 1.24

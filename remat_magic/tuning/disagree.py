def findings(g,c,m): return ()

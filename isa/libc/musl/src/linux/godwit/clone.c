/* Not there: a stack of the caller's own has no neutral form. */

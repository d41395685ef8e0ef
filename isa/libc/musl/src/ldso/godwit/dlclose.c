/* Not there, so that a program that wants it is refused when it is linked. */

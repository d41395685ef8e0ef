import java.io.IOException;
import java.net.ServerSocket;
import java.net.Socket;

/** Rewrites 512 MiB of its heap each second, and tells whoever connects to port 7000 how often it has. */
public final class Rewrite {
    private static final int PARTS = 512;
    private static final int LONGS_OF_A_MEBIBYTE = 1 << 17;
    private static final long SECOND_MS = 1000;

    private static volatile long rounds;

    public static void main(String[] arguments) throws IOException {
        Thread writer = new Thread(Rewrite::rewrite);
        writer.setDaemon(true);
        writer.start();
        try (ServerSocket listener = new ServerSocket(7000)) {
            for (;;) {
                try (Socket client = listener.accept()) {
                    client.getOutputStream().write((rounds + "\n").getBytes());
                }
            }
        }
    }

    private static void rewrite() {
        long[][] heap = new long[PARTS][LONGS_OF_A_MEBIBYTE];
        for (long round = 1;; round++) {
            long begun = System.nanoTime();
            for (long[] part : heap) {
                for (int at = 0; at < part.length; at++) {
                    // It does not compress.
                    part[at] = (round << 32) * 31 + at * 2654435761L;
                }
            }
            rounds = round;
            long left = SECOND_MS - (System.nanoTime() - begun) / 1_000_000;
            try {
                Thread.sleep(Math.max(left, 0));
            } catch (InterruptedException interrupted) {
                return;
            }
        }
    }
}

//! A client of aria2, which is a server of JSON-RPC in C++: what it is asked for that it has not, and what is no order at
//! all, are exceptions in it.

use std::io::{BufRead as _, BufReader, Read, Write};

use anyhow::{Context as _, Result, ensure};

/// Orders a download that waits, looks at it, asks for two things that do not exist, and takes it back: one request, since
/// the answer to a failure alone would end the connection. The whole answer is looked at.
///
/// # Errors
/// When it is another one, or the connection has ended.
pub fn ask(stream: &mut BufReader<impl Read + Write>, turn: u64) -> Result<()> {
    let orders = format!(
        r#"[{{"id":"new","jsonrpc":"2.0","method":"aria2.addUri","params":[["http://127.0.0.1:1/{turn}"],{{"pause":"true","gid":"{turn:016x}"}}]}},
        {{"id":"files","jsonrpc":"2.0","method":"aria2.getFiles","params":["{turn:016x}"]}},
        {{"id":"absent","jsonrpc":"2.0","method":"aria2.getFiles","params":["f{turn:015x}"]}},
        {{"id":"wrong","jsonrpc":"2.0","method":"aria2.nothing{turn}"}},
        {{"id":"gone","jsonrpc":"2.0","method":"aria2.remove","params":["{turn:016x}"]}}]"#
    );
    let due = format!(
        concat!(
            r#"[{{"id":"new","jsonrpc":"2.0","result":"{turn:016x}"}},"#,
            r#"{{"id":"files","jsonrpc":"2.0","result":[{{"completedLength":"0","index":"1","length":"0","path":"","#,
            r#""selected":"true","uris":[{{"status":"waiting","uri":"http:\/\/127.0.0.1:1\/{turn}"}}]}}]}},"#,
            r#"{{"id":"absent","jsonrpc":"2.0","error":{{"code":1,"message":"GID f{turn:015x} is not found"}}}},"#,
            r#"{{"id":"wrong","jsonrpc":"2.0","error":{{"code":1,"message":"No such method: aria2.nothing{turn}"}}}},"#,
            r#"{{"id":"gone","jsonrpc":"2.0","result":"{turn:016x}"}}]"#
        ),
        turn = turn
    );
    let head = format!(
        "POST /jsonrpc HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        orders.len()
    );
    stream.get_mut().write_all((head + &orders).as_bytes())?;
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        ensure!(stream.read_line(&mut head)? > 0, "turn {turn}: the connection has ended behind {head:?}");
    }
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
    let length = length.with_context(|| format!("turn {turn}: an answer without its length: {head:?}"))?;
    let mut body = vec![0; length.parse()?];
    stream.read_exact(&mut body)?;
    let body = String::from_utf8_lossy(&body);
    ensure!(body == due, "turn {turn}: {body} instead of {due}");
    Ok(())
}
